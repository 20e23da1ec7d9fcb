"""The families of models that read pictures, by the model_type of their config."""
