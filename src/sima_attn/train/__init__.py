"""Training and evaluation: images and a model -> checkpoints, weights and metrics.

recipes     settings of runs as frozen dataclasses; one function per recipe
engine      the training loop; a Task defines model, batches and loss
start       everything before and after the loop: recipe -> run folder with weights
stopping    SIGINT and SIGTERM
recorded    CUDA graphs
classify    the classification task        evaluate  accuracy of a trained model
finetune    fine-tuning of a trained model        finetune_recipe  its settings
run         the folder of a run        checkpoint, logs, curves  the files in it
recipe_files  recipes in files, checked before use
"""
