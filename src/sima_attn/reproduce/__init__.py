"""The paper's tables beside ours: grids of runs, their rows, tables and figures.

grid  runs a table of recipes        miniature, dino  the two grids, *_report  their tables and figures
paper_models, table_1, detection  the paper's numbers
"""
