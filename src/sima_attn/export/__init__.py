"""Export of models: ONNX files, int8 quantization, and runtimes.

onnx        model -> ONNX file                  photo_graph  preparation of a photo, inside the graph
detector    detector -> ONNX file               runtimes     ONNX Runtime and OpenVINO with one interface
int8_graph  float32 graph -> int8 graph         quantize     ONNX file -> int8 file, compared on images
"""
