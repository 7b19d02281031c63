"""The CNI protocol: request in, one JSON document out. Knows nothing of meshes."""
