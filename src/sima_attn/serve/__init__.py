"""A page on which a photo is classified and looked into.

limits    what a request may cost: bytes, pixels, waiting, seconds
photos    uploaded bytes -> photo, or a refusal that says why
looking   model and photo -> what the page shows
app       the routes, their headers and errors      run    uvicorn around it      page/    the page itself
"""
