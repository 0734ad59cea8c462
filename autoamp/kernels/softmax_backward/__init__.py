"""A softmax that stands for a chain gets gradients as true as the chain's."""
