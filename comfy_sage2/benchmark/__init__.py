"""`python -m comfy_sage2 bench`: the kernels beside other attentions: speed, memory and accuracy in one run."""
