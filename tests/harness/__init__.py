"""What several folders of tests stand on: real servers, a clock moved by hand, a journal with furniture."""
