"""What tensors made of sizes and numbers hold at each of their positions."""
