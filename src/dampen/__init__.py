"""dampen: any Transformer regularizer in any PyTorch model in one line."""

__version__ = "0.1.0"
