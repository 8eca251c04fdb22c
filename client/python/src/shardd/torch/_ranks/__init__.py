"""Who the ranks are and how they agree: meshes, nodes, meetings, the name of a job, whole tensors out of the ranks' pieces."""
