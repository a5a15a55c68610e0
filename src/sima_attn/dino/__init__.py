"""Self-supervised training (DINO) on the training loop of `sima_attn.train`.

recipes  settings of runs        task  student, teacher and loss        knn_monitor  k-NN accuracy during a run
"""
