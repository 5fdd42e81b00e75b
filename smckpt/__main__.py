from smckpt.cli.app import main

main()
