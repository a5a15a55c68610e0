"""Object detection and instance segmentation: Mask R-CNN and Faster R-CNN on the models of the zoo.

backbone  images -> feature maps of four blocks             pyramid  feature maps -> strides 4, 8, 16, 32, 64
rcnn      images -> boxes, classes, scores, masks           weights  files -> detectors
folders   a folder -> the annotations of a split            yolo     YOLO labels -> the content of a COCO file
coco      that content -> checked objects                   scores   detections -> results in COCO's format, AP
augment   random flip, crop and size                        recipes  settings of a run
task      training and evaluation                           drawing  objects on an image
predict   photos -> pictures and JSON
"""
