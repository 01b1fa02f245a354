"""What the graph engine launches: Triton kernels, and the forwards of target and drafter made of them."""
