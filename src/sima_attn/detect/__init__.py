"""Images -> boxes and instance masks: Mask R-CNN on the models of the zoo.

backbone   images -> the maps of four blocks, padding left out      pyramid    maps -> strides 4, 8, 16, 32, 64
mask_rcnn  images -> boxes, classes, scores, masks                  coco       COCO's files, its AP
augment    multi-scale and crops                                    recipes    what a run is
task       training by the one loop, AP of a split                  weights    files -> detectors
predict    photos -> pictures and json                              paper_table  Table 4
"""
