//! How a batch of pages is written down: the table of methods and their encoders and decoders.
