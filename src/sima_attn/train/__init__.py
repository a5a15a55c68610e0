"""Images and a model -> checkpoints and metrics.

recipes   what a run is: frozen dataclasses, one function a run
data      folders, parquet, tar shards, digits -> batches
engine    the only loop; a Task says what is trained
classify  the classification task        evaluate  its numbers for a finished model
run       the folder of a run            checkpoint, logs, progress, curves  what lies in it
"""
