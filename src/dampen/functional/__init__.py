"""The mathematics of the methods as functions of tensors: no model, no site, no state. Methods come
here to compute."""
