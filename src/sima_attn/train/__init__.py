"""Images and a model -> checkpoints and metrics.

recipes   what a run is: frozen dataclasses, one function a run
data      folders, parquet, tar shards, digits -> batches
engine    the only loop; a Task says what is trained        start  a run from recipe to weights, around the loop
stopping  signals that end a run after its step
classify  the classification task        evaluate  its numbers for a finished model
miniature the paper's ablations as a grid of runs, miniature_report  its tables and figure
dino      self-distillation, dino_recipes, crops; features, knn, linear  what frozen features are worth
run       the folder of a run            checkpoint, logs, progress, curves  what lies in it
"""
