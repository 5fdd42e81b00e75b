"""Commands that run a training to show that it resumes: prove and chaos."""
