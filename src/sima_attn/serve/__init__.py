"""A page on which a photo is classified and looked into, and one on which the browser itself runs the model.

limits    what a request may cost: bytes, pixels, waiting, seconds      connections   the same for a connection
photos    uploaded bytes -> photo, or a refusal that says why
analyzer  model and photo -> what the page shows          in_browser   ONNX file -> what the second page needs
app       the routes, their headers and errors      run    uvicorn around it      page/    the pages themselves
"""
