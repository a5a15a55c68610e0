"""The attentions that the paper compares SimA with, one file each."""
