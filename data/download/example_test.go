package download_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"

	"github.com/goddp/goddp/data/download"
)

func ExampleFile() {
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "pixels") }))
	defer mirror.Close()
	dir, err := os.MkdirTemp("", "download")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "train")
	err = download.File(context.Background(), download.Request{URL: mirror.URL + "/train", Path: path, MD5: "1eb36d2e9fa0b4ff4b27bac1b3f1eae5"})
	fmt.Println("wrong file:", err != nil)
	err = download.File(context.Background(), download.Request{URL: mirror.URL + "/train", Path: path})
	content, _ := os.ReadFile(path)
	fmt.Println(string(content), err)
	// Output:
	// wrong file: true
	// pixels <nil>
}
