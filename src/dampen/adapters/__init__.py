"""What the general sockets cannot see: nn.MultiheadAttention, and residual branches."""
