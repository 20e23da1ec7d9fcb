"""Generated text in the format of text-generation-inference (TGI) of Hugging Face."""
