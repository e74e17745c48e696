"""One model trained whole, by the jobs and the calls that adapters are trained by."""
