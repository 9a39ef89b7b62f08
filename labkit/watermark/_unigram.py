"""One green list for all positions, as a configuration of transformers' `generate` [ours]."""

from transformers import WatermarkingConfig, WatermarkLogitsProcessor


class UnigramConfig(WatermarkingConfig):
    """Watermarking configuration whose green list hangs on the key alone."""

    def construct_processor(self, vocab_size: int, device) -> WatermarkLogitsProcessor:
        """The processor that adds the bias."""
        return _UnigramProcessor(vocab_size, device, **self.to_dict())


class _UnigramProcessor(WatermarkLogitsProcessor):
    def set_seed(self, input_seq):
        self.rng.manual_seed(self.hash_key)
