"""The live page and its API: `maskless serve`. What needs FastAPI stands in web.py, requests.py and routes.py."""
