"""The reference engine and other fakes, as product code: what the tests and the demo run without SGLang."""
