"""Training and evaluation: images and a model -> checkpoints, weights and metrics.

recipes     settings of runs as frozen dataclasses; one function per recipe
start       everything before and after the loop: recipe -> run folder with weights
engine      the training loop        task  what it trains: model, batches and loss
learning_rates, average, recorded, non_finite, stopping     its parts: schedules, EMA, CUDA graphs, NaN, signals
fabric, strategies, elastic     one or several processes, and restarts by torchrun
sharding, sharded_checkpoint    parameters that are split over processes        mesh  images that are
classify    the classification task        teacher   a classifier to learn from, beside the labels
evaluate    accuracy of a trained model
finetune    fine-tuning of a trained model        finetune_recipe  its settings
run         the folder of a run        checkpoint, logs, curves  the files in it
recipe_files  recipes in files, checked before use
"""
