"""The paper's tables beside ours.

grid, processes  make the runs of a table      miniature, dino  the two tables of runs; *_report  their figures
table_1, detection  the paper's numbers
"""
