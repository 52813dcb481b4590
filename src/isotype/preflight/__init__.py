"""CHECK: one training step as a request, traced, judged, its fixes tried; from a model, a trainer, a function or a script."""
