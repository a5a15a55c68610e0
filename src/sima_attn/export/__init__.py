"""Export of models: ONNX files, int8 quantization, and runtimes."""
