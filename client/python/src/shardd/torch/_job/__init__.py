"""A registered model has a job: these modules describe it, open it, bind parameters to its memory, write it, give it up."""
