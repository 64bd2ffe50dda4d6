"""What is where in a model, found by structure before anything is changed.

`sites` finds the layers, `layer` what surrounds an attention, `roles` what each linear layer does,
`depth` their order; `source` reads the code of a class. Nothing here runs a forward.
"""
