// load: posts the objects of a file as fast as the API server takes them, over a fixed number of connections. What
// the operator is compared with.
//
//	load -server https://10.200.0.1:6443 -pki FOLDER -connections 64 FILE
//
// Each line of the file is {"path": "/api/v1/namespaces/x/pods", "body": {...}}. Lines with a lower "wave" are done
// before any of a higher one.
// Prints one JSON line: {"objects": N, "seconds": S, "failed": F}.
package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

type object struct {
	Path string          `json:"path"`
	Wave int             `json:"wave"`
	Body json.RawMessage `json:"body"`
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func main() {
	server := flag.String("server", "", "")
	pki := flag.String("pki", "", "folder with ca.crt, admin.crt, admin.key")
	connections := flag.Int("connections", 64, "")
	flag.Parse()

	ca, err := os.ReadFile(*pki + "/ca.crt")
	fail(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	certificate, err := tls.LoadX509KeyPair(*pki+"/admin.crt", *pki+"/admin.key")
	fail(err)
	transport := &http.Transport{
		TLSClientConfig:     &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{certificate}},
		MaxConnsPerHost:     *connections,
		MaxIdleConnsPerHost: *connections,
		TLSNextProto:        map[string]func(string, *tls.Conn) http.RoundTripper{}, // HTTP/1.1: as many connections as said
	}
	client := &http.Client{Transport: transport, Timeout: 60 * time.Second}

	file, err := os.Open(flag.Arg(0))
	fail(err)
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 16<<20)
	waves := map[int][]object{}
	for scanner.Scan() {
		var o object
		fail(json.Unmarshal(scanner.Bytes(), &o))
		waves[o.Wave] = append(waves[o.Wave], o)
	}
	fail(scanner.Err())
	order := []int{}
	for wave := range waves {
		order = append(order, wave)
	}
	sort.Ints(order)

	var failed, done atomic.Int64
	begin := time.Now()
	for _, wave := range order {
		queue := make(chan object)
		var workers sync.WaitGroup
		for i := 0; i < *connections; i++ {
			workers.Add(1)
			go func() {
				defer workers.Done()
				for o := range queue {
					response, err := client.Post(*server+o.Path, "application/json", bytes.NewReader(o.Body))
					if err != nil {
						failed.Add(1)
						fmt.Fprintln(os.Stderr, err)
						continue
					}
					text, _ := io.ReadAll(response.Body)
					response.Body.Close()
					if response.StatusCode >= 300 {
						if failed.Add(1) < 4 {
							fmt.Fprintln(os.Stderr, response.Status, string(text))
						}
					} else {
						done.Add(1)
					}
				}
			}()
		}
		for _, o := range waves[wave] {
			queue <- o
		}
		close(queue)
		workers.Wait()
	}
	fmt.Printf("{\"objects\": %d, \"seconds\": %.3f, \"failed\": %d}\n",
		done.Load(), time.Since(begin).Seconds(), failed.Load())
	if failed.Load() > 0 {
		os.Exit(1)
	}
}
