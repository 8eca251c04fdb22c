"""Who the ranks are: names of jobs, nodes, threads."""
