module atp.dev/hack/pause

go 1.24
