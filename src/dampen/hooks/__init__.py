"""Where regularizers plug in: the layers of a model are found, their modules get another forward, and it can be undone.

`attach` is the way in (used by `handle`); `find` and `roles` say what is where, `forwards` what a module then does.
"""
