"""How a regularizer gets into a model, and out of it again.

The way in is `patch` (used by `handle`). `discover` says what is where, `context` is what one
forward of a block knows, and `attention`, `torch_mha`, `library_backends`, `tracing`, `block`,
`residual`, `experts` and `model` say what a module then does. `weights` and `builtin_dropout` act
beside the forward; `describe` prints what sits where.
"""
