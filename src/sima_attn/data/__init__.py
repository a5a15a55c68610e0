"""Image files -> batches.

images   read image files as upright RGB          sources  data sets: folders, parquet, tar shards, digits
loader   batches decoded by worker processes      cache    batches from a data set decoded once, on the device
augment  random augmentation of whole batches     crops    DINO's multi-crop
workers  the decoding processes                   settings recipe settings
"""
