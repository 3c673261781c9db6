"""A local training service that speaks the Tinker API: `covey serve`."""
