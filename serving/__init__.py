"""The decode engine (`serving.engine`, plain torch, no Ray) and the Ray Serve app around it."""
