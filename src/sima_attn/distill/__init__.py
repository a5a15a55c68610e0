"""softmax teacher -> the same network with an exp-free attention, taught on images without labels."""
