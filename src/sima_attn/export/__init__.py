"""Model -> what leaves the training machine: ONNX files, int8, and the runtimes they run in."""
