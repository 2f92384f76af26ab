"""The CUDA backend: stages enqueued on the caller's stream and one consumer stream per rank.

``backend.py`` runs the stages; ``params.py`` holds the kernels' parameter structs, ``variants.py``
their compilations, ``tables.py`` the upload of plans, ``tensor_map.py`` TMA descriptors.
"""
