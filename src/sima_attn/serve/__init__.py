"""Web pages that classify a photo and show attention maps; one of them runs the model in the browser.

limits      limits of a request             connections  limits of a connection
photos      uploaded bytes -> photo         analysis     model and photo -> contents of the page
detection   detector and photo -> objects, drawn on the photo
in_browser  ONNX file -> what the second page needs
app         routes, headers, errors         run  uvicorn        page/  HTML, CSS and JavaScript
"""
