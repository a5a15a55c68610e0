"""Self-supervised training (DINO) on the one training loop.

recipes  what a run is        task  student, teacher, loss        knn_monitor  k-NN accuracy during a run
"""
