"""The capture plugin: hooks inside SGLang that write what a prefill computes to dumps."""
