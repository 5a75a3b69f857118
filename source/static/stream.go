package static

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf16"
)

// toUTF8 takes a byte order mark away and undoes UTF-16, which PowerShell
// writes where output is redirected to a file.
func toUTF8(data []byte) []byte {
	var order binary.ByteOrder
	switch {
	case bytes.HasPrefix(data, []byte("\xef\xbb\xbf")):
		return data[3:]
	case bytes.HasPrefix(data, []byte("\xff\xfe")):
		order = binary.LittleEndian
	case bytes.HasPrefix(data, []byte("\xfe\xff")):
		order = binary.BigEndian
	default:
		return data
	}
	units := make([]uint16, 0, len(data)/2)
	for data = data[2:]; len(data) >= 2; data = data[2:] {
		units = append(units, order.Uint16(data))
	}
	return []byte(string(utf16.Decode(units)))
}

// stream reads documents that "---" lines part. They are parted here and not by
// the YAML decoder, so that one that does not parse does not hide the next.
func (r *reader) stream(data []byte) {
	for line := 1; len(data) > 0; {
		end := nextMarker(data)
		r.document(data[:end], line)
		line += bytes.Count(data[:end], []byte("\n"))
		data = data[end:]
	}
}

// nextMarker returns the offset of the next line, but the first, that begins
// with "---" and blank: in YAML always a marker, whatever it stands in.
func nextMarker(data []byte) int {
	for at := 0; ; {
		i := bytes.Index(data[at:], []byte("\n---"))
		if i < 0 {
			return len(data)
		}
		at += i + 1
		if end := at + 3; end == len(data) || strings.IndexByte(" \t\r\n", data[end]) >= 0 {
			return at
		}
	}
}

// document reads what stands between two markers: one YAML document, or any
// number of JSON objects.
func (r *reader) document(data []byte, line int) {
	body, at := skipBlank(data, line)
	switch {
	case len(body) == 0:
	case isJSON(body):
		r.jsonStream(body, at)
	default:
		r.yaml(data, line)
	}
}

// skipBlank skips blanks, comments, directives and markers.
func skipBlank(data []byte, line int) ([]byte, int) {
	for len(data) > 0 {
		switch {
		case data[0] == '\n':
			line++
			data = data[1:]
		case data[0] == ' ', data[0] == '\t', data[0] == '\r':
			data = data[1:]
		case data[0] == '#', data[0] == '%':
			end := bytes.IndexByte(data, '\n')
			if end < 0 {
				end = len(data)
			}
			data = data[end:]
		case bytes.HasPrefix(data, []byte("---")), bytes.HasPrefix(data, []byte("...")):
			data = data[3:]
		default:
			return data, line
		}
	}
	return nil, line
}

// isJSON tells whether data begins with { and then " or }. An object of YAML's
// flow style whose first key is quoted is taken for JSON, too.
func isJSON(data []byte) bool {
	if data[0] != '{' {
		return false
	}
	rest := bytes.TrimLeft(data[1:], " \t\r\n")
	return len(rest) == 0 || rest[0] == '"' || rest[0] == '}'
}

// mostBroken is how many broken JSON documents of one stream are tried.
const mostBroken = 100

// jsonStream reads JSON objects that follow each other. After what is none it
// goes on at the next line that begins with {.
func (r *reader) jsonStream(data []byte, line int) {
	failed := 0
	for len(data) > 0 {
		end, err := 0, errNotObject
		if data[0] == '{' {
			end, err = r.jsonDocument(data, line)
		}
		if err != nil {
			at := line
			if !errors.Is(err, errNotObject) {
				at, err = jsonError(data, line, err)
			}
			r.report(at, "", "", err)
			if end = bytes.Index(data, []byte("\n{")); end < 0 {
				return
			}
			if failed++; failed == mostBroken { // each is read up to where it breaks
				r.report(at, "", "", fmt.Errorf("%d documents are broken; the rest of the input is left out", failed))
				return
			}
		}
		line += bytes.Count(data[:end], []byte("\n"))
		data, line = skipBlank(data[end:], line)
	}
}

var errNotObject = errors.New("not an object: a document begins with {")

// jsonError tells where JSON that begins at a line is wrong: a decoder that has
// read tokens knows it no longer.
func jsonError(data []byte, line int, err error) (int, error) {
	var syntax *json.SyntaxError
	if errors.As(json.Unmarshal(data, new(json.RawMessage)), &syntax) {
		line += bytes.Count(data[:syntax.Offset], []byte("\n"))
		err = syntax
	}
	return line, fmt.Errorf("not JSON: %w", err)
}

// jsonDocument reads the JSON object that data begins with and returns its end.
// The items of a list are decoded one by one, so that a broken one does not
// take the others along, and memory holds no list twice.
func (r *reader) jsonDocument(data []byte, line int) (end int, err error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	if _, err := dec.Token(); err != nil { // {
		return 0, err
	}
	var h head
	var items []span
	var raw json.RawMessage
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return 0, err
		}
		value := bytes.TrimLeft(data[dec.InputOffset():], ": \t\r\n")
		if key == "items" && bytes.HasPrefix(value, []byte("[")) {
			items, err = jsonItems(dec)
		} else if err = dec.Decode(&raw); err == nil {
			h.read(key, raw)
		}
		if err != nil {
			return 0, err
		}
	}
	if _, err := dec.Token(); err != nil { // }
		return 0, err
	}
	end = int(dec.InputOffset())
	of, ok := h.list()
	if !ok {
		r.json(h, data[:end], line)
		return end, nil
	}
	r.seen = r.seen || len(items) == 0
	at := 0
	for _, s := range items {
		line += bytes.Count(data[at:s.from], []byte("\n"))
		at = s.from
		r.jsonItem(of, data[s.from:s.to], line)
	}
	return end, nil
}

// span is where an item stands in its document.
type span struct{ from, to int }

func jsonItems(dec *json.Decoder) (items []span, err error) {
	if _, err := dec.Token(); err != nil { // [
		return nil, err
	}
	var raw json.RawMessage
	for dec.More() {
		if err := dec.Decode(&raw); err != nil {
			return nil, err
		}
		to := int(dec.InputOffset())
		items = append(items, span{to - len(raw), to})
	}
	_, err = dec.Token() // ]
	return items, err
}

// jsonItem reads an item of a list, whose own kind and version may be left out
// where the list's name tells them.
func (r *reader) jsonItem(of head, data []byte, line int) {
	h := of
	// An error is met again, and reported, where the object is decoded.
	_ = json.Unmarshal(data, &h)
	r.json(h, data, line)
}

func (r *reader) json(h head, data []byte, line int) {
	if h.own() {
		r.yaml(data, line) // JSON is YAML, and its nodes know their lines
		return
	}
	r.object(h, line, func() ([]byte, error) { return data, nil })
}
