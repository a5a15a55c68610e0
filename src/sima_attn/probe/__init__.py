"""Frozen features -> k-NN accuracy, a linear classifier, maps of features.

features  images -> features, stored on disk        knn, linear  their accuracy        feature_map  a picture of them
knn_classifier  features and labeled images -> a classifier without training
"""
