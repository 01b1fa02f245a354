from ddlab.cli import main

raise SystemExit(main())
