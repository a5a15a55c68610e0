"""Object detection and instance segmentation: Mask R-CNN on the models of the zoo.

backbone   images -> feature maps of four blocks            pyramid  feature maps -> strides 4, 8, 16, 32, 64
mask_rcnn  images -> boxes, classes, scores, masks          coco     COCO annotations, results and AP
augment    random flip, crop and size                       recipes  settings of a run
task       training and evaluation                          weights  files -> detectors
predict    photos -> pictures and JSON
"""
