"""`python -m lab bench`: the kernels beside other attentions: speed, memory and accuracy in one run."""
