"""Frozen features -> k-NN accuracy, a linear classifier, maps of features.

features  images -> features, stored on disk        knn, linear  their accuracy        feature_map  a picture of them
"""
